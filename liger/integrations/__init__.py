"""What hooks the losses into other libraries. Nothing here is imported by `import liger`."""
