"""Families of models, by the `model_type` of their config, whose layers the planner reads right.

Each was compared, weight by weight, with the model that transformers 5.23 builds of the family's default config: the
Linears of its layers, its embedding and its head.  Others are refused by name, such as those with experts, with
convolutions between projections, with latent attention or with shared layers.  Pure.

GATED have a gate beside the up projection of their MLPs, PLAIN have none; T5's say so themselves.
"""

# -- written by tests/planner/real_models.py

GATED = (
    "aimv2_vision_model", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "esmc", "eurobert",
    "exaone4", "exaone4_5_vision", "gemma", "gemma2", "gemma3_text", "gemma4_vision", "glm", "glm4",
    "glm4v_text", "glm5_next_vision", "glm_image_text", "glm_ocr_text", "glm_ocr_vision", "granite",
    "granite_docling_text", "granite_swa", "gte", "helium", "hyperclovax", "internlm3", "iquestcoder", "llama",
    "ministral3", "mistral", "modernbert", "modernbert-decoder", "mt5", "muse_glimmer_assistant", "nomic_bert", "olmo",
    "olmo2", "olmo3", "pe_audio_encoder", "phi3", "pixtral", "qwen2", "qwen2_5_vl_text", "qwen2_5_vl_vision",
    "qwen2_vl_text", "qwen3", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm", "ultrabert", "umt5",
    "vaultgemma", "voxtral_realtime_encoder",
)  # fmt: skip

PLAIN = (
    "apertus", "arcee", "audio-spectrogram-transformer", "audioflamingo3_encoder", "bart", "beit", "bert",
    "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "bros", "camembert",
    "canine", "chinese_clip_vision_model", "clip_text_model", "clip_vision_model", "codegen",
    "cosmos3_edge_text", "cosmos3_edge_vision", "ctrl", "data2vec-audio", "data2vec-text", "data2vec-vision",
    "deberta", "deberta-v2", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "distilbert", "dpr",
    "dpt", "electra", "ernie", "falcon", "glm_image_vision", "glmasr_encoder", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gptj", "gradium_phonon_tts", "hubert", "hunyuan_vl_vision", "idefics3_vision", "ijepa",
    "inkling2_vision", "internvl_vision", "jais2", "jina_embeddings_v3", "kimi_k25_vision", "layoutlm",
    "layoutlmv3", "longt5", "m2m_100", "markuplm", "mbart", "megatron-bert", "mimi_decoder", "mimi_encoder",
    "minicpm_ocr_vision", "minicpmv4_7_vision", "mlcd_vision_model", "moss_transcribe_diarize_audio", "mpnet",
    "mpt", "mra", "muse_glimmer_vision", "muse_spark_vision", "mvp", "nanochat",
    "nemotron3_5_transcribe_asr_audio", "nemotron3_diarization_audio", "nystromformer", "openai-gpt", "opt",
    "patchtst", "pegasus", "pegasus_x", "persimmon", "phi", "pixio", "plbart", "pocket_tts",
    "pocket_tts_audio_tokenizer_decoder", "pocket_tts_audio_tokenizer_encoder", "qianfan_ocr_vision",
    "qwen3_5_moe_vision", "qwen3_5_vision", "qwen4_exp_vision", "radio", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "sam3_vit_model", "sam_hq_vision_model", "sam_vision_model", "sew", "sew-d",
    "siglip2_vision_model", "siglip_vision_model", "smolvlm_vision", "speech_to_text", "splinter", "starcoder2",
    "t5", "tapas", "tipsv2_text_model", "tipsv2_vision_model", "tvp", "udop", "unispeech", "unispeech-sat",
    "video_llama_3_vision", "videomae", "vilt", "visual_bert", "vit", "vit_mae", "vit_msn", "vitdet", "vivit",
    "voxtral_encoder", "wav2vec2", "whisper", "xglm", "xlm-roberta", "xlm-roberta-xl", "yolos", "yoso",
)  # fmt: skip

ENCODER_DECODERS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "longt5", "m2m_100", "mbart", "mt5", "mvp",
    "pegasus", "pegasus_x", "plbart", "speech_to_text", "t5", "udop", "umt5", "whisper",
)  # fmt: skip

WITHOUT_VOCABULARY = (
    "beit", "data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "voxtral_encoder",
    "voxtral_realtime_encoder", "wav2vec2",
)  # fmt: skip
