"""A conversation as text: the template (template), and its text with the spans that train and a
check of what the template leaves out (rendering, spans)."""
