"""Who writes the next tokens: codecs, renderers and samplers."""
