# tshard.h and tshard_uv.h are put together from the rooms of src/, where they are changed. Both are
# in the repository: what builds them needs no Python.

tshard.h: src/rooms $(wildcard src/[0-9]*/*.h)
backends/tshard_uv.h: src/rooms-uv $(wildcard src/uv/*.h)
tshard.h backends/tshard_uv.h:
	@! command -v $(PYTHON) >/dev/null || $(PYTHON) src/join.py $< $@

build/compile_commands.json: src/rooms src/rooms-uv
	@! command -v $(PYTHON) >/dev/null || $(PYTHON) src/commands.py
