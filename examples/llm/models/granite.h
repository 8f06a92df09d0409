/* granite.h - Granite 3 (IBM 2024): LLaMA with constant factors of the embeddings, attention
 * scores, outputs of attention and MLP, and logits. */
#ifndef LLM_GRANITE_H
#define LLM_GRANITE_H

/* Reads a factor, by default 1. Refuses 0, which in llm_config stands for 1. */
static double granite_factor(llm_config *c, const char *key) {
    const double value = llm_config_number(c, key, 1);
    if (value == 0) llm_refuse(c, "config.json: %s is 0; it must be another number", key);
    return value;
}

static void granite_config(llm_config *c) {
    llama_config(c);
    c->embed_scale = granite_factor(c, "embedding_multiplier");
    c->scale = granite_factor(c, "attention_multiplier");
    c->branch_scale = granite_factor(c, "residual_multiplier");
    c->logit_scale = 1 / granite_factor(c, "logits_scaling");
}

static const llm_family granite_family = {"granite",   "model",      granite_config, llama_add,
                                          llama_embed, llama_finish, NULL};

#endif
