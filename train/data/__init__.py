"""From files to batches.

- `text`: the documents of a text, and their tokens in a cache; `windows`: batches of these tokens.
- `tokens`: the protocol of a vocabulary; `vocabulary`: those that a text or a tokenizer.json
  defines; `published_vocabulary`: those of published models.
"""
