"""A conversation as text and tokens: the template (template), its text and the spans that train
(rendering, spans), what the template leaves out (omitted), the tokens of spans (token_spans)."""
