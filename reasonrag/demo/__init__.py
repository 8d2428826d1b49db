"""An invented encyclopedia, its exact judge, a tiny policy trained on it, and a policy without a neural network."""
