/* mistral.h - Mistral 7B (Jiang et al. 2023): LLaMA with a sliding window. */
#ifndef LLM_MISTRAL_H
#define LLM_MISTRAL_H

static void mistral_config(llm_config *c) {
    llama_sizes(c, 1e-6, 0);
    c->kv_heads = llm_config_count(c, "num_key_value_heads", 8);
    llm_read_activation(c, "hidden_act", "silu");
    llm_read_window(c, 4096, 0, 0);
    llm_read_rope(c, 10000, 1);
}

static const llm_family mistral_family = {"mistral",   "model",      mistral_config, llama_add,
                                          llama_embed, llama_finish, NULL};

#endif
