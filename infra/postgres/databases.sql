-- Run once, when the volume is new: `prefect` is made by the image.
CREATE DATABASE mlflow;
CREATE DATABASE mlflow_auth;
