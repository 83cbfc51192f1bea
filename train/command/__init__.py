"""The commands: `train`, `generate`, `convert`, `evaluate` and `export`.

- `initial_weights`, `pretrained`: the weights and vocabularies that a command reads from a run or a
  published checkpoint.
- `generation_files`, `chat`: what the files beside a checkpoint say about tokens, stops and chats.
"""
