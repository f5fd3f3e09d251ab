"""LayerGraph + cut -> the nn.Module of each stage."""
