/* ========================================================================== */
/* >>recurrent-api                                      MARK: - recurrent-api */
/* Recurrent networks: LSTM and GRU, and their layers.                        */
/* Needs: >>module-api.                                                       */
/* ========================================================================== */

/* Options of tsh_lstm and tsh_gru, and of their layers. */
typedef struct tsh_recurrent_desc {
    int64_t in, hidden; /* numbers of features of x and of h (units); read by tsh_add_lstm and
                         * tsh_add_gru only: the ops take them from the shapes */
    int layers;         /* number of stacked layers; each takes the outputs of the one before; 0
                         * means 1 */
    int bidirectional;  /* 1: every layer also goes through the sequence from its end, with weights
                         * of its own; its outputs are those of both directions, concatenated */
    int batch_first;    /* 1: x is (B, T, in); 0: (T, B, in) */
    tsh_choice bias;    /* TSH_NO: no biases; TSH_USUAL: b_ih and b_hh */
    double dropout;     /* probability of dropout on the outputs of each layer but the last;
                         * tsh_lstm and tsh_gru always apply it, the layers of tsh_add_lstm and
                         * tsh_add_gru in training mode only */
    tsh_module *owner;  /* tsh_lstm, tsh_gru: the module that keys the dropout masks; NULL: the
                         * ctx */
    tsh_choice sharded; /* tsh_add_lstm, tsh_add_gru: TSH_YES: the units are sharded over tp;
                         * TSH_USUAL: they are not */
    tsh_dtype dtype;    /* tsh_add_lstm, tsh_add_gru: dtype of the parameters; 0: tsh_desc.dtype */
} tsh_recurrent_desc;
/* Runs a long short-term memory (Hochreiter & Schmidhuber 1997) over x (T, B, in), or (B, T, in)
 * with .batch_first, or (T, in) without a batch. Returns h of the last layer at all T time steps,
 * x's shape with D H features in place of in, for H units and D directions, 1 or 2. *h and *c,
 * unless h or c is NULL, become h and c after the last time step (of the reverse direction: the
 * first), (layers D, B, H). h0 and c0, of that shape, are those before the first one; NULL: 0. desc
 * NULL: all 0.
 * weights has `count` tensors: of each layer, and of each direction in it, W_ih (4 H, features of
 * the layer's input), W_hh (4 H, H) and, unless .bias is TSH_NO, b_ih and b_hh (4 H), whose rows
 * are those of the gates i, f, g, o: i, f, o = sigmoid(W_ih x + b_ih + W_hh h + b_hh), g =
 * tanh(..); c = f c + i g; h = o tanh(c). Results have x's dtype; h and c are in tsh_real from step
 * to step. Layouts: weights R, with x R, or sharded along B (then the gradients of weights are
 * partial); h0 and c0 are R, or laid out as *h. Or all weights sharded by units, each a shard of
 * tsh_shard_segments(0, 4, unit), with x R: the result is S(-1), *h and *c S(2), h0 and c0 R or
 * S(2), the gradient of x is partial; forward runs an all-gather of h per time step, backward one
 * of the gates' gradients per time step and two more; the input of each further layer is gathered.
 * Values have the same bits at every degree, as have gradients that are not partial. The products
 * with W_hh are always the built-in ones.
 * Errors: counts, shapes or layouts that do not fit; T is 0; x is P, or sharded otherwise; dropout
 * is not within [0, 1].
 * torch: nn.LSTM, torch.lstm */
TSH_API tsh_tensor *tsh_lstm(tsh_tensor *x, tsh_tensor *const *weights, int count, tsh_tensor *h0,
                             tsh_tensor *c0, const tsh_recurrent_desc *desc, tsh_tensor **h,
                             tsh_tensor **c);
/* Runs a gated recurrent unit (Cho et al. 2014): as tsh_lstm, but without c, and with 3 H rows of
 * weights and biases, those of r, z, n (and tsh_shard_segments(0, 3, unit)): r, z = sigmoid(W_ih x
 * + b_ih + W_hh h + b_hh), n = tanh(W_ih x + b_ih + r (W_hh h + b_hh)), h = (1 - z) n + z h.
 * torch: nn.GRU, torch.gru */
TSH_API tsh_tensor *tsh_gru(tsh_tensor *x, tsh_tensor *const *weights, int count, tsh_tensor *h0,
                            const tsh_recurrent_desc *desc, tsh_tensor **h);

/* Adds an LSTM layer (tsh_lstm), with parameters "weight_ih_l0", "weight_hh_l0", "bias_ih_l0",
 * "bias_hh_l0", of the reverse direction the same with "_reverse" at the end, of further layers
 * with l1, ...: each uniform in [-s, s), s = 1 / sqrt(hidden). tsh_forward takes x, tsh_forward_n
 * also h0 and c0, and returns h of all time steps. With .sharded = TSH_YES, or by a plan that gives
 * ROWWISE with .segments = 4 to all its parameters ("lstm.*"), the units are sharded. NULL and an
 * error: sizes below 1, or layers below 0.
 * torch: nn.LSTM */
TSH_API tsh_module *tsh_add_lstm(tsh_module *parent, const char *name,
                                 const tsh_recurrent_desc *desc);
/* Adds a GRU layer (tsh_gru): as tsh_add_lstm, but without c0, and with .segments = 3 in plans.
 * torch: nn.GRU */
TSH_API tsh_module *tsh_add_gru(tsh_module *parent, const char *name,
                                const tsh_recurrent_desc *desc);
/* Runs an LSTM layer and also outputs the last h and c, as tsh_lstm does; h0, c0, h and c may be
 * NULL. TSH_ERR_STATE if the layer itself is checkpointed (tsh_checkpoint), which keeps its first
 * output only, unless h and c are NULL.
 * torch: nn.LSTM.forward */
TSH_API tsh_tensor *tsh_lstm_forward(tsh_module *module, tsh_tensor *x, tsh_tensor *h0,
                                     tsh_tensor *c0, tsh_tensor **h, tsh_tensor **c);
/* Runs a GRU layer and also outputs the last h; see tsh_lstm_forward.
 * torch: nn.GRU.forward */
TSH_API tsh_tensor *tsh_gru_forward(tsh_module *module, tsh_tensor *x, tsh_tensor *h0,
                                    tsh_tensor **h);
