#!/bin/sh
# Copy ip and tc with their libraries into a folder (2 MB), for a machine without iproute2 and without a network:
#     sh benchmarks/pack_network.sh build/network          here
#     PATH=$PWD/build/network:$PATH make gpu-report ...    there
set -eu
folder=${1:?which folder}
mkdir -p "$folder/lib"
for program in ip tc; do
    found=$(command -v "$program") || { echo "$program not found: install iproute2" >&2; exit 1; }
    cp -L "$found" "$folder/lib/$program"
    # All libraries but those of the C library, which must fit the loader of the other machine.
    for library in $(ldd "$found" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | grep -vE '/lib(c|m|dl|rt|pthread)\.so'); do
        cp -L "$library" "$folder/lib/"
    done
    # The loader's own option, because LD_LIBRARY_PATH would reach the programs that `ip netns exec` starts.
    cat >"$folder/$program" <<EOF
#!/bin/sh
lib=\$(dirname "\$(readlink -f "\$0")")/lib
exec /lib64/ld-linux-x86-64.so.2 --library-path "\$lib" "\$lib/$program" "\$@"
EOF
    chmod +x "$folder/$program"
done
