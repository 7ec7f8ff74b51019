"""From records to what is shown and stored: `result` (JSON), `checks` (gates), `table`."""
