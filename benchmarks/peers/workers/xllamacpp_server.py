"""llama.cpp's server from the prebuilt xllamacpp package, in that package's environment."""

from __future__ import annotations

import argparse
import threading

import xllamacpp  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    """Serve until killed; the library answers on threads of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    for name in ("port", "num_places", "context", "num_threads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.port = args.port
    params.n_parallel = args.num_places
    params.n_ctx = args.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.num_threads
    params.cache_ram_mib = 0
    params.cache_prompt = False
    # The name keeps the server alive.
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}")
    threading.Event().wait()


if __name__ == "__main__":
    main()
