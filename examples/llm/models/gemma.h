/* gemma.h - Gemma (Mesnard et al. 2024): LLaMA with norms by weight + 1, embeddings times sqrt(C),
 * and tanh's GELU. */
#ifndef LLM_GEMMA_H
#define LLM_GEMMA_H

/* All but rotary positions. */
static void gemma_options(llm_config *c) {
    llama_sizes(c, 1e-6, 1);
    c->norm = LLM_RMS_ONE;
    c->head_size = llm_config_count(c, "head_dim", 256);
    llm_read_activation(c, "hidden_activation|hidden_act", "gelu_pytorch_tanh");
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 0);
    llm_config_must(c, "use_bidirectional_attention", 0, 0);
    c->embed_scale = sqrt((double)c->width);
}

static void gemma_config(llm_config *c) {
    gemma_options(c);
    llm_read_rope(c, 10000, 1);
}

static const llm_family gemma_family = {"gemma",   "model",       gemma_config,
                                        llama_add, llama_forward, NULL};

#endif
