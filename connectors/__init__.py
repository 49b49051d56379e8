"""How changes get into the log: PostgreSQL's catalogue, Kafka topics, Debezium in Kafka Connect."""
