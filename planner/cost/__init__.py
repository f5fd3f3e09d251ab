"""What layers, stages, links and memory cost, and the price of a whole plan. No torch.

`pricing.price` takes the costs of layers (`layer_costs`), stages of them with their options (`stage_options`), and what
the plan is for (`setting`). It asks the cost model (`models`) for the plan's time and the microbatches that its stages
hold, and returns a `price.Price`.
"""
