# Ports a program of tshard 0.1 to 0.2: sed -i -f rename_0_2.sed PROGRAM.c (GNU sed). Run it once:
# some of the new names were those of other functions. CHANGELOG.md says what each was; calls that
# are written over several lines may need a hand, and do not compile until they have had it.
s/\btsh_full\b/tsh_full_tensor/g
s/\btsh_filled\b/tsh_full/g
s/\btsh_split\b/tsh_comm_split/g
s/\btsh_split_dim\b/tsh_split/g
s/\btsh_dim\b/tsh_size/g
s/\btsh_local_dim\b/tsh_local_size/g
s/\btsh_retain\b/tsh_retain_grad/g
s/\btsh_chunk(&/tsh_shard_range(/g
s/\btsh_chunk(\([a-z]\)/tsh_shard_range(*\1/g
s/\btsh_chunk\b/tsh_shard_range/g
s/\btsh_layout_text(&/tsh_layout_text(/g
s/\(\btsh_tensor_new(\([^()]\|([^()]*)\)*\), *NULL)/\1, tsh_replicated())/g
s/\(\btsh_tensor_new(\([^()]\|([^()]*)\)*\), &\([a-z]\)/\1, \3/g
s/\(\btsh_tensor_from(\([^()]\|([^()]*)\)*\), *NULL,/\1, tsh_replicated(),/g
s/\(\btsh_tensor_from([^,]*, [^,]*, tsh_shape[0-9]([^()]*), \)&\([a-z]\)/\1\2/g
s/\.no_bias = 1\b/.bias = TSH_NO/g
s/\.\(qkv_bias\|out_bias\|bias\) = 1\b/.\1 = TSH_YES/g
# callbacks have user last; a field that takes one has another name, where it had one of these forms
s/\blogger\(\.\|->\)fn\b/logger\1log/g
s/\ballocator\(\.\|->\)fn\b/allocator\1allocate/g
s/\bgemm\(\.\|->\)fn\b/gemm\1multiply/g
/\btsh_custom_desc\b/s/\.\(shape\|layout\) =/.out[0].\1 =/g
s/\btsh_custom_desc\b/tsh_custom_op_desc/g
s/\(\btsh_custom_op(\([^()]\|([^()]*)\)*\), \([^(),]*)\)/\1, NULL, \3/g
s/(void \*\([a-z_]*\), \(const char \*\(message\|text\)\b[^()]*\))/(\2, void *\1)/
s/(void \*\([a-z_]*\), \(void \*ptr\b[^()]*\))/(\2, void *\1)/
s/(void \*\([a-z_]*\), \(int64_t at, void \*[^()]*\))/(\2, void *\1)/
/(void \*[a-z_]*, tsh_tensor \*const \*in\b[^)]*$/N
/(void \*[a-z_]*, int64_t m\b[^)]*$/{N;N;N}
s/(void \*\([a-z_]*\), \(tsh_tensor \*const \*in\b[^()]*\))/(\2, void *\1)/
s/(void \*\([a-z_]*\), \(int64_t m\b[^()]*\))/(\2, void *\1)/
s/\btsh_log_stderr(\([^(),]*\), \([^()]*\))/tsh_log_stderr(\2, \1)/
# the values of a custom op's outputs and their gradients come as arrays, with one entry per output
s/^\(static void [a-z_0-9]*(tsh_tensor \*const \*in, int n,\) tsh_real \*\([a-z_]*\), \(void \*[a-z_]*) {\)/\1 void *const *\2s, \3\n    tsh_real *\2 = (tsh_real *)\2s[0];/
s/, const tsh_real \*out,\([ \n]*\)const tsh_real \*grad_out, \(tsh_real \*const \*[a-z_]*, void \*[a-z_]*) {\)/, const void *const *outs,\1const tsh_real *const *grads, \2\n    const tsh_real *out = (const tsh_real *)outs[0], *grad_out = grads[0];/
