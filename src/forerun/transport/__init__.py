"""Between the API process and the engine process: the spawned side, the pipe, the client side."""
