"""The router process: takes requests from clients and gives them to workers. No torch."""
