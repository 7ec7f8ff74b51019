"""The client: HTTP wire (`connection`), streams (`stream`), server (`endpoint`), load (`load`)."""
