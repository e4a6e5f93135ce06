# The card of the exported file, and both in a repository of the hub.
CARD = f"{RUN}/README.md"


rule card:
    message:
        "Write {output}"
    input:
        settings=f"{RUN}/settings/card.json",
        materials=f"{RUN}/materials.json",
        corpus=f"{RUN}/corpus.json",
        index=f"{RUN}/shards.json",
        evaluation=f"{RUN}/eval.json",
        exported=settings.exports,
    output:
        CARD,
    log:
        f"{RUN}/logs/card.log",
    benchmark:
        f"{RUN}/benchmarks/card.tsv"
    params:
        settings=settings.model_dump(),
    threads: 1
    resources:
        mem_mb=1000,
        runtime="10m",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/card.py"


REFUSAL = publishing.refusal(settings)


# No outputs: what the repository has already is not sent again. What would be refused in the end waits for nothing.
rule publish:
    message:
        "{params.what}"
    input:
        exported=[] if REFUSAL else settings.exports,
        companion=[] if REFUSAL else settings.companion or [],
        card=[] if REFUSAL else CARD,
    log:
        f"{RUN}/logs/publish.log",
    params:
        settings=settings.model_dump(),
        what=REFUSAL or f"Upload {settings.exported} and its card to {settings.publish.repository}",
    threads: 1
    resources:
        mem_mb=2000,
        runtime="4h",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/publish.py"
