"""The command line: one file a verb, which parses, calls the api and prints. Nothing heavy is imported to parse."""
