"""Methods are written against this package: config, setting, messages, and the two sides `Server` and `Client`."""
