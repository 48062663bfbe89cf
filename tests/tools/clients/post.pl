# Posts a body by Perl's client.
use strict;
use HTTP::Tiny;
my ($url, $body) = @ARGV;
my $answer = HTTP::Tiny->new->post(
    $url, { content => $body, headers => { "content-type" => "application/json" } });
print $answer->{content};
