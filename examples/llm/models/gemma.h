/* gemma.h - Gemma (Mesnard et al. 2024): LLaMA with RMS norms that multiply by weight + 1,
 * embeddings times sqrt(C), and the tanh approximation of GELU. */
#ifndef LLM_GEMMA_H
#define LLM_GEMMA_H

/* Reads what all versions of Gemma have, except the activation and rotary positions. */
static void gemma_options(llm_config *c) {
    llama_sizes(c, 1e-6, 1);
    c->norm = LLM_RMS_ONE;
    c->head_size = llm_config_count(c, "head_dim", 256);
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 0);
    llm_config_must(c, "use_bidirectional_attention", 0, 0);
    c->embed_scale = sqrt((double)c->width);
}

/* Reads the activation under `key`. Files may have it under `other` (hidden_act or
 * hidden_activation), too, which transformers ignores: its value must be the same there, or "gelu",
 * which early files have although they mean the tanh approximation. */
static void gemma_read_activation(llm_config *c, const char *key, const char *other) {
    llm_read_activation(c, key, "gelu_pytorch_tanh");
    const tsh_activation act = c->act;
    const cJSON *item = llm_config_key(c, other);
    if (!item) return;
    llm_read_activation(c, other, NULL);
    if (c->act != act && c->act != TSH_GELU)
        llm_refuse_value(c, other, item, "it must say what the other of hidden_act and "
                                         "hidden_activation says");
    c->act = act;
}

static void gemma_config(llm_config *c) {
    gemma_options(c);
    gemma_read_activation(c, "hidden_act", "hidden_activation");
    if (c->act == TSH_GELU) c->act = TSH_GELU_TANH;
    llm_read_rope(c, 10000, 1);
}

static const llm_family gemma_family = {"gemma",     "model",      gemma_config, llama_add,
                                        llama_embed, llama_finish, NULL};

#endif
