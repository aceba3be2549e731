"""What users are told of autocast.

`advice` says why a product is in float32, and which sizes Tensor Cores run slowly. `operations` describes one
operation, `attentions` the softmaxes between two matmuls. `page` shows the operations beside the source.
`explain` makes the report.
"""
