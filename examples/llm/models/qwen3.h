/* qwen3.h - Qwen 3 (Yang et al. 2025): LLaMA with an RMS norm of each head's query and key. */
#ifndef LLM_QWEN3_H
#define LLM_QWEN3_H

static void qwen3_config(llm_config *c) {
    llama_sizes(c, 1e-6, 0);
    c->head_size = llm_config_count(c, "head_dim", 128);
    llm_read_activation(c, "hidden_act", "silu");
    c->qk_norm = LLM_NORM_OF_EACH;
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 0);
    qwen2_read_window(c);
    llm_read_rope(c, 10000, 1);
}

static const llm_family qwen3_family = {"qwen3",     "model",      qwen3_config, llama_add,
                                        llama_embed, llama_finish, NULL};

#endif
