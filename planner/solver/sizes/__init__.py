"""How many samples a minibatch and a microbatch have, where nobody says."""
