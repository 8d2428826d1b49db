"""Parts that every training run shares: settings, model, folder with checkpoints, callbacks, harness and outcome."""
