"""From answers to a loss: anchors and their blocks, the batch, the terms, what they show."""
