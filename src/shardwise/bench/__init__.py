"""Measuring: shardwise and its peers side by side, on real ranks or on an emulated fabric."""
