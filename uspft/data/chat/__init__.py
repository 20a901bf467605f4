"""A conversation as text: the template (template), its text with the spans that train, and what the
template leaves out (rendering, spans)."""
