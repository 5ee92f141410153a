"""From a checkpoint and a configuration to engines: export, compile, manifest."""
