-- Run once, when the volume is new: `prefect` is made by the image.
CREATE DATABASE mlflow ENCODING 'UTF8' TEMPLATE template0;
CREATE DATABASE mlflow_auth ENCODING 'UTF8' TEMPLATE template0;
