# The targets of tshard: for find_package, and by way of CMakeLists.txt for add_subdirectory and
# FetchContent.
#
#   tshard::tshard     the headers; one file of the program defines TSHARD_IMPLEMENTATION
#   tshard::threads    the same, with what a backend needs: backends/tshard_threads.h,
#   tshard::uv         tshard_uv.h (libuv, libsodium), tshard_mpi.h (an MPI), tshard_blis.h (BLIS)
#   tshard::mpi
#   tshard::blis
#   tshard::static     the implementation as a library, with every backend that was found when it was
#                      built: no file of the program defines TSHARD_IMPLEMENTATION. A program that
#                      calls another backend than threads links its target after this one:
#                      target_link_libraries(program tshard::static tshard::uv)
#
# find_package(tshard REQUIRED COMPONENTS uv) fails if libuv or libsodium is missing. Without
# COMPONENTS, every backend of TSHARD_BACKENDS whose libraries are found has a target, and a message
# says why another has none.

cmake_policy(PUSH)
cmake_policy(VERSION 3.16)

# The headers are in include/tshard beside lib/ or lib/<architecture>/, or in the source tree.
get_filename_component(_tshard_here "${CMAKE_CURRENT_LIST_FILE}" REALPATH)
get_filename_component(_tshard_here "${_tshard_here}" DIRECTORY)
set(TSHARD_INCLUDE_DIR "")
foreach(_tshard_up ../../../include/tshard ../../../../include/tshard ../..)
    get_filename_component(_tshard_folder "${_tshard_here}/${_tshard_up}" ABSOLUTE)
    if(NOT TSHARD_INCLUDE_DIR AND EXISTS "${_tshard_folder}/tshard.h")
        set(TSHARD_INCLUDE_DIR "${_tshard_folder}")
    endif()
endforeach()

# Defines tshard::<name>, which links the libraries that follow. For add_subdirectory it must be
# global, or the project around that folder does not see it.
function(_tshard_define name)
    set(global "")
    if(_tshard_in_source_tree)
        set(global GLOBAL)
    endif()
    add_library(tshard::${name} INTERFACE IMPORTED ${global})
    target_link_libraries(tshard::${name} INTERFACE ${ARGN})
endfunction()

# In strict C (CMAKE_C_EXTENSIONS OFF) the system's headers declare POSIX only when asked to.
function(_tshard_needs_posix name)
    set(extensions "$<TARGET_PROPERTY:C_EXTENSIONS>")
    set(strict "$<AND:$<NOT:$<STREQUAL:${extensions},>>,$<NOT:$<BOOL:${extensions}>>>")
    target_compile_definitions(tshard::${name} INTERFACE
        "$<$<AND:$<COMPILE_LANGUAGE:C>,${strict}>:_POSIX_C_SOURCE=200809L>")
endfunction()

# Searches for a header and a library; adds them to _tshard_missing if one is not found.
macro(_tshard_find what header library)
    find_path(TSHARD_${what}_INCLUDE ${header} PATH_SUFFIXES ${ARGN})
    find_library(TSHARD_${what}_LIBRARY ${library})
    mark_as_advanced(TSHARD_${what}_INCLUDE TSHARD_${what}_LIBRARY)
    if(NOT TSHARD_${what}_INCLUDE OR NOT TSHARD_${what}_LIBRARY)
        list(APPEND _tshard_missing "${header} or lib${library}")
    endif()
endmacro()

# Searches with a module of CMake's own. Its target must be as visible as ours, which links it.
macro(_tshard_find_package package target)
    if(NOT TARGET ${target})
        find_package(${package} QUIET ${ARGN})
        if(TARGET ${target} AND _tshard_in_source_tree)
            set_target_properties(${target} PROPERTIES IMPORTED_GLOBAL TRUE)
        endif()
    endif()
    if(NOT TARGET ${target})
        list(APPEND _tshard_missing "${package} for ${_tshard_language}")
    endif()
endmacro()

get_property(_tshard_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
set(_tshard_language CXX)
if("C" IN_LIST _tshard_languages)
    set(_tshard_language C)
endif()

if(NOT TARGET tshard::tshard)
    _tshard_define(tshard)
    target_include_directories(tshard::tshard INTERFACE "${TSHARD_INCLUDE_DIR}")
    if(NOT MSVC)
        target_link_libraries(tshard::tshard INTERFACE m)
    endif()
endif()

set(_tshard_library "${CMAKE_STATIC_LIBRARY_PREFIX}tshard${CMAKE_STATIC_LIBRARY_SUFFIX}")
get_filename_component(_tshard_library "${_tshard_here}/../../${_tshard_library}" ABSOLUTE)
set(_tshard_wanted ${tshard_FIND_COMPONENTS})
if(NOT _tshard_wanted)
    if(NOT DEFINED TSHARD_BACKENDS)
        set(TSHARD_BACKENDS threads uv mpi blis)
    endif()
    set(_tshard_wanted ${TSHARD_BACKENDS})
    if(EXISTS "${_tshard_library}")
        list(APPEND _tshard_wanted static)
    endif()
endif()

set(tshard_FOUND TRUE)
foreach(_tshard_name IN LISTS _tshard_wanted)
    set(_tshard_missing "")
    if(TARGET tshard::${_tshard_name})
        # found before
    elseif(_tshard_name STREQUAL "threads")
        _tshard_find_package(Threads Threads::Threads)
        if(NOT _tshard_missing)
            _tshard_define(threads tshard::tshard Threads::Threads)
            _tshard_needs_posix(threads)
        endif()
    elseif(_tshard_name STREQUAL "uv")
        _tshard_find_package(Threads Threads::Threads)
        _tshard_find(UV uv.h uv)
        _tshard_find(SODIUM sodium.h sodium)
        if(NOT _tshard_missing)
            _tshard_define(uv tshard::tshard Threads::Threads
                "${TSHARD_UV_LIBRARY}" "${TSHARD_SODIUM_LIBRARY}")
            target_include_directories(tshard::uv INTERFACE
                "${TSHARD_UV_INCLUDE}" "${TSHARD_SODIUM_INCLUDE}")
            _tshard_needs_posix(uv)
        endif()
    elseif(_tshard_name STREQUAL "mpi")
        _tshard_find_package(MPI MPI::MPI_${_tshard_language} COMPONENTS ${_tshard_language})
        if(NOT _tshard_missing)
            _tshard_define(mpi tshard::tshard MPI::MPI_${_tshard_language})
            _tshard_needs_posix(mpi)
        endif()
    elseif(_tshard_name STREQUAL "blis")
        _tshard_find(BLIS blis.h blis blis)
        if(NOT _tshard_missing)
            _tshard_define(blis tshard::tshard "${TSHARD_BLIS_LIBRARY}")
            target_include_directories(tshard::blis INTERFACE "${TSHARD_BLIS_INCLUDE}")
            _tshard_needs_posix(blis)
        endif()
    elseif(_tshard_name STREQUAL "static")
        _tshard_find_package(Threads Threads::Threads)
        if(NOT EXISTS "${_tshard_library}")
            list(APPEND _tshard_missing "${_tshard_library} (cmake --install makes it)")
        endif()
        set(_tshard_in_static threads)
        include("${_tshard_here}/tshardStatic.cmake" OPTIONAL)
        foreach(_tshard_backend uv mpi blis)
            if("${_tshard_backend}" IN_LIST tshard_FIND_COMPONENTS
                    AND NOT "${_tshard_backend}" IN_LIST _tshard_in_static)
                list(APPEND _tshard_missing
                    "${_tshard_backend} in ${_tshard_library}, which was built without it")
            endif()
        endforeach()
        if(NOT _tshard_missing)
            add_library(tshard::static STATIC IMPORTED)
            set_target_properties(tshard::static PROPERTIES
                IMPORTED_LOCATION "${_tshard_library}")
            target_link_libraries(tshard::static INTERFACE tshard::tshard Threads::Threads)
        endif()
    else()
        set(_tshard_missing "tshard has no such component")
    endif()

    set(tshard_${_tshard_name}_FOUND TRUE)
    if(_tshard_missing)
        set(tshard_${_tshard_name}_FOUND FALSE)
        string(REPLACE ";" ", " _tshard_missing "${_tshard_missing}")
        set(_tshard_why "tshard::${_tshard_name} is not defined; missing: ${_tshard_missing}")
        if(tshard_FIND_REQUIRED_${_tshard_name})
            set(tshard_FOUND FALSE)
            set(tshard_NOT_FOUND_MESSAGE "${_tshard_why}")
        elseif(NOT tshard_FIND_QUIETLY)
            message(STATUS "${_tshard_why}")
        endif()
    endif()
endforeach()

cmake_policy(POP)
