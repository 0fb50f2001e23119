"""How well a script scales, and why not better: `evenstep bench`.

modes.py       what `evenstep bench` does besides running a script
cost.py        what a collective costs: links, hosts, algorithms        pure
network.py     --network: what the world's transport makes of the network
simulate.py    a step on ranks that one doesn't have                    pure
profile.py     what a step is made of, from what a wrapped model has recorded
predict.py     --predict: a measured step, simulated on more ranks
published.py   --published: cases that others have measured             pure
"""
