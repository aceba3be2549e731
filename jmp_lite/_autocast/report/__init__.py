"""What users are told of autocast.

`advice` says why a product is in float32, and which sizes Tensor Cores run slowly. `gradients` finds the
matmul to which a matmul of the backward pass belongs. `operations` describes one operation, `attentions` the
softmaxes between two matmuls. `page` shows the operations beside the source. `explain` makes the report.
"""
