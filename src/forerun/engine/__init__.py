"""The step loop and everything it calls: scheduler, runner, commit, transports."""
