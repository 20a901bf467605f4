"""How long `plan` itself takes."""
