"""A world of one prefill, one decode and two requests, small enough that every interleaving of it is walked through."""
