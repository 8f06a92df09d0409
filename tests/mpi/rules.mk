# The tests of layers and collectives on the processes of an mpirun, with each MPI that is here.
# Private ones have a static library of their own. Left out: what is over TCP; test_changes, in
# which an error ends a world at once, as on threads; test_load_cache, whose ranks are threads.
MPI_PARTS := collectives $(patsubst tests/layer/%.c,%,$(filter-out \
	%_tcp.c %/test_changes.c %/test_load_cache.c,$(sort $(wildcard tests/layer/test_*.c))))
MPI_TESTS := $(foreach p,tests only,$(MPIS:%=build/mpi-%/$p)) $(if $(MPIS),build/gpt-mpi)
MPI_TEST   = @mkdir -p $(@D); echo "  CC $@"; mpicc$(patsubst .any,,.$*) $(STD) -O0 -g1 $(WALL) \
	-DTSHARD_IMPLEMENTED
vpath test_%.c tests/layer
vpath collectives.c tests/mpi

build-tests: $(if $(findstring test_mpi,$(call chosen,$(SCRIPTS))),$(MPI_TESTS))

$(MPI_PARTS:%=build/mpi/%.o): build/mpi/%.o: %.c $(HEADERS) $(FOUND)
	@mkdir -p $(@D); echo "  CC $@"
	@$(CC) $(STD) -O0 -g1 $(WALL) -DTESTS_MPI -Itests/support/plain -Dmain=$* -c -o $@ $< \
		$(if $(filter $<,$(PRIVATE)),-DTSHARD_STATIC)

build/mpi-%/tests: tests/mpi/main.c Makefile $(MPI_PARTS:%=build/mpi/%.o) $(OUT)/tests/library.o \
		$(HEADERS) $(FOUND)
	$(MPI_TEST) -DTESTS_PARTS="$(foreach p,$(MPI_PARTS),X($p))" -o $@ $(filter %.c %.o,$^) $(LINK_TEST)

build/mpi-%/only: tests/mpi/only.c $(OUT)/tests/library.o $(HEADERS) $(FOUND)
	$(MPI_TEST) -o $@ $(filter %.c %.o,$^) $(LINK_TEST)
