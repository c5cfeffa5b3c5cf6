"""The gated delta rule: chunked forward and backward, and decode. README.md beside this has the mathematics."""
