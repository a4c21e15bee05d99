"""The identity of this process: its rank and host, as its launcher reports them."""
