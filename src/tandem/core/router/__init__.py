"""Who serves, and which prefill and decode serve one request together."""
