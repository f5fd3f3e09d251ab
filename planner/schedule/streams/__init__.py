"""Streams of instructions: the pieces they are made of, what is made from them, their proof and their drawing."""
