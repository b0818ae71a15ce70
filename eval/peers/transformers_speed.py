"""Hugging Face transformers as an engine: its default cache and attention, greedy, float32.

It runs in a Python of its own that has PyTorch; kvjax never imports it there.
"""

import copy


class Engine:
    """A causal language model of transformers, from a GGUF file or a Hugging Face folder."""

    def __init__(self, job):
        import torch
        import transformers
        from quality import load

        self.torch, self.cache = torch, transformers.DynamicCache
        torch.set_num_threads(len(job["cores"]))
        self.model = load(job["model"])
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.versions["attention"] = self.model.config._attn_implementation

    def prefill(self, ids, room, recipe):
        """(next token, cache) after the ids."""
        if recipe != "exact":
            raise ValueError(f"transformers has no recipe {recipe}")
        with self.torch.inference_mode():
            out = self.model(
                self.torch.tensor([ids]),
                past_key_values=self.cache(config=self.model.config),
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1:].argmax(-1), out.past_key_values

    def fork(self, state):
        with self.torch.inference_mode():
            return copy.deepcopy(state)

    def decode(self, state, steps):
        """One token at a time, as `generate` does."""
        token, cache = state
        made = []
        with self.torch.inference_mode():
            for _ in range(steps):
                out = self.model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
                made.append(token)
            return (token, cache), [int(t) for t in made]

    def sizes(self, state):
        parts = {p.data_ptr(): p.numel() * p.element_size() for p in self.model.parameters()}
        held = sum(
            x.numel() * x.element_size()
            for layer in state[1].layers
            for x in (layer.keys, layer.values)
        )
        return {"weight_bytes": sum(parts.values()), "cache_bytes": held}
