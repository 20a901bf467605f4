"""A conversation as text and tokens: the template (template), its text with the spans that train,
and what the template leaves out (rendering, spans), the tokens of spans (token_spans)."""
