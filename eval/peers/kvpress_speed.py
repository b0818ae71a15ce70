"""kvpress as an engine: transformers, whose prefill a press compresses as kvpress has it."""

import kvpress_quality
import transformers_speed


class Engine(transformers_speed.Engine):
    """A causal language model of transformers under the presses of kvpress."""

    def __init__(self, job):
        super().__init__(job)
        self.told = {recipe["label"]: recipe for recipe in job["told"]}
        kvpress_quality.lend_tokenizer(self.model)

    def prefill(self, ids, room, recipe):
        """(next token, cache) after the ids."""
        if recipe == "exact":
            return super().prefill(ids, room, recipe)
        told, config = self.told[recipe], self.model.config
        heads = config.num_hidden_layers * config.num_key_value_heads
        *_, press = kvpress_quality.pressed(told, told["kept"], len(ids), heads)
        with self.torch.inference_mode(), press(self.model):
            made = super().prefill(ids, room, "exact")
        kvpress_quality.taken(self.model)  # else the next prompt would be masked too
        return made
