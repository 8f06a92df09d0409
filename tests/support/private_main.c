/* The main function of the tests of private.c. */
int private_main(int argc, char **argv);

int main(int argc, char **argv) {
    return private_main(argc, argv);
}
