"""A float64 decoder that evicts as the cards of H2O and TOVA do, and what a cache remembers.

`Card` is the decoder of hard.py, which shares no code with kvjax.
"""

import collections

import numpy as np
from cases import PLAIN, model
from hard import Dense
from holding import arrivals


class Card(Dense):
    """Reads chunks, then keeps the newest `window` tokens and the best of the older: by their sum
    over all queries, meaned over the heads of a kv head, or by the last row, over all heads."""

    def __init__(self, slots, window, last):
        super().__init__(model(PLAIN).params, PLAIN)
        self.slots, self.window, self.last = slots, window, last
        heads = range(PLAIN.kv_heads)
        self.kept = [[[] for _ in heads] for _ in range(PLAIN.layers)]
        self.stat = [[collections.Counter() for _ in heads] for _ in range(PLAIN.layers)]

    def feed(self, chunk):
        """Logits of the last token of a chunk, which sees what was kept and the chunk so far."""
        own = []
        for token in chunk:
            out = self.read(token, [[k + own for k in heads] for heads in self.kept])
            own.append(len(self.k[0]) - 1)
            for rows, stats in zip(self.rows, self.stat, strict=True):
                for n, stat in enumerate(stats):
                    some = rows if self.last else rows[2 * n : 2 * n + 2]
                    mean = {p: np.mean([row[p] for row in some]) for p in some[0]}
                    mean = collections.Counter(mean)
                    stats[n] = mean if self.last else stat + mean
        for heads, stats in zip(self.kept, self.stat, strict=True):
            for n, stat in enumerate(stats):
                new = heads[n] + own
                cut = len(new) - min(self.window, len(new))
                best = sorted(new[:cut], key=lambda p: -stat[p])[: self.slots - self.window]
                heads[n] = sorted(best + new[cut:])
        return out


def remembered(cache, row=0):
    """`stat` of what a row remembers: [layer][kv head] of {arrival: stat}."""
    out = []
    for group in cache.groups:
        if group.tail.stat is None:
            continue
        tail, (body,) = arrivals(cache, group)
        for i in range(group.stop - group.start):
            heads = []
            for n in range(PLAIN.kv_heads):
                pos = np.concatenate([tail[row], body[i, row, n].ravel()])
                stat = [group.tail.stat[i, row, n], group.bodies[0].stat[i, row, n].ravel()]
                pairs = zip(pos.tolist(), np.concatenate(stat).tolist(), strict=True)
                heads.append({p: x for p, x in pairs if p >= 0})
            out.append(heads)
    return out
