"""The parts of `examples/train_lm.py`: text, tokens, model, the loss layer's cost, and the report."""
