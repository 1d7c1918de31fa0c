"""The trainer's side of the policy: model, layouts, log-probabilities, optimizer, the update."""
